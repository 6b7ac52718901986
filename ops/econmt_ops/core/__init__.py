"""What all ops share: checked shapes, lengths, precision, dropout, chunks, products with laid-out weights."""

from __future__ import annotations
