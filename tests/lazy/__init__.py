"""Tests of lazy."""
