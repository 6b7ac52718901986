"""Model folders made from others, and folders for econmt_runtime."""
