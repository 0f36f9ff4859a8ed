"""Real libraries on the device, compared with CPU torch: ``make test-integrations`` installs them.

Each test runs in an interpreter of its own, since libraries are changed when they are imported and keep the device that
they found. Where a library is not installed its tests are skipped.
"""
