"""Random programs: made from a seed, run on the CPU and on the device in every mode, compared, and made smaller."""
