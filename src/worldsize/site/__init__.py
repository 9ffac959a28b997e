"""The site: what MkDocs shows of the book, beside the Markdown of its pages."""
