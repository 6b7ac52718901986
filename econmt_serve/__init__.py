"""Server of trained models over HTTP, with LibreTranslate's interface and a page; ``econmt serve`` starts it."""
