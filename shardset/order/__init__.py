"""Which sample goes where: permutations, the order of an epoch, its memory budget."""
