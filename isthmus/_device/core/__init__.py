"""The path of an op on the device: buffers and layouts, dispatch and plans, views, mutation, donation."""
