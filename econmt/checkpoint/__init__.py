"""Model folders and checkpoints: atomic writing, validated reading, recovery after a crash, resuming."""
