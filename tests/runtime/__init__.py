"""JAX's compiler as the package uses it: options on the CPU, executables on disk, progress, memory of a GPU."""
