"""Modules for Sockeye's options that no fused operation has, computed step by step."""
