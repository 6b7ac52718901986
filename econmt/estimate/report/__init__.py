"""Reports of ``econmt profile``: tables for a terminal, an HTML page, JSON."""
