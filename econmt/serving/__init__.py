"""A trained model behind HTTP: LibreTranslate's interface, and a page in the browser; ``econmt serve`` starts it."""
