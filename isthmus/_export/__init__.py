"""Programs that leave home: torch models as StableHLO, weights and a signature, which run where no torch is."""
