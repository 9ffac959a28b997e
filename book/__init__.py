"""The engine of the book, in three rooms.

- ``book.core``  what the book is made of: transcript, page, program
- ``book.run``   pytest: what runs it, compares it, records it
- ``book.site``  MkDocs: what draws it

The first imports nothing of the other two, and they nothing of each other.
"""
