"""Problems in: files, the chat template, and the endless shuffled stream that training draws from."""
