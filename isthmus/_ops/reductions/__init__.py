"""Reductions, running reductions, order, histograms, segments."""
