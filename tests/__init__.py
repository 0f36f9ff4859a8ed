"""The tests, in the folders of the package they test; README.md beside this file says what is where."""
