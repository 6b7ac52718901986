"""Text as the server and ``econmt translate`` divide it: sentences, paragraphs, HTML and its markup."""
