"""The one folder that talks to JAX's compiler."""
