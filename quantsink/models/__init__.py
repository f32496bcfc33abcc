"""Reading a transformers model: where it lies, where its heads are, what identifies it. Nothing is changed."""
