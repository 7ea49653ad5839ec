"""The actors: the parts of a writer, a reader and a controller that take engines from version to version."""
