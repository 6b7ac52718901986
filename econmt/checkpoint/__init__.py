"""Model folders and checkpoints: written whole or not at all, read with every check, resumed from."""
