"""Models as StableHLO: they compute the same in torch, in JAX and without torch, and bad files say what is wrong."""
