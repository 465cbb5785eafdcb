"""RecD: session data, deduplicating converters, preprocessing and pooling on unique rows."""
