"""Tables, charts and the HTML page of a memory account."""
