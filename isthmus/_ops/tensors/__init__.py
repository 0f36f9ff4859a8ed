"""Creation, shapes, views and indexing."""
