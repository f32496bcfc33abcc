"""The modules that replace a model's own: linear layers, experts, and the tables of attention modules."""
