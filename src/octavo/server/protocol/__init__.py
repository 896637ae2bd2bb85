"""What clients may send: strict models of request bodies, and sentences for what is wrong."""
