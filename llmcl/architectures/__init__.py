"""Model descriptions: configuration files, layers by family."""
