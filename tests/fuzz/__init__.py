"""Calls and programs made at random, from a seed, and run on the CPU and on the device."""
