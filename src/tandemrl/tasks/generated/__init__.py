"""What the tiny pairs learn: word problems, and worlds of documents to search in."""
