"""Every hook into transformers: the attention function, the cache, the quantizer, and the changes to a model."""
