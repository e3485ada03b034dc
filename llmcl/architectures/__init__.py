"""Descriptions of models: configuration files, and each family's layers."""
