"""Text: files and formats, downloads, filters, vocabularies, source factors, lexicons."""
