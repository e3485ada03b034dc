"""Tools to examine a device or a model: doctor, tune, profile, perplexity, benchmark."""
