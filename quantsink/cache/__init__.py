"""How a quantized KV cache is stored: what each layer keeps, its banks of codes, its size."""
