"""Tests of dynamo."""
