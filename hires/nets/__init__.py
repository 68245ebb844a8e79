"""Builds networks, plain ``nn.Module``s, and traces them to graphs."""
