"""The MkDocs plugin and the Markdown extension that build the website of the book."""
