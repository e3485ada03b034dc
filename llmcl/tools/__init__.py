"""What a user examines a device or a model with: doctor, tune, profile, perplexity, benchmark."""
