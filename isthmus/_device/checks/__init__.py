"""What a call must satisfy: value checks, and refusals that are asked of the CPU."""
