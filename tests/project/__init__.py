"""The project around the code: documents and their examples, the command line, import order, packaging, caches."""
