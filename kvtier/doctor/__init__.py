"""`kvtier doctor` and `kvtier clear`: what each configured tier can do here, what is wrong, and emptying it."""
