"""Several rank processes compute one model together (tensor parallel). Nothing outside this package knows of their
processes: `ranks` is rank 0's view of them, `follower` what each of the others runs."""
