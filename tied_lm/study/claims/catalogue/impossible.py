"""Claims that cannot be put to the test with what there is, and why."""

NOT_DONE = {
    "19": (
        "An orthonormal shared memory with a learned transform keeps output = pseudo-inverse of input "
        "(arXiv:2602.04556)",
        "no scheme keeps the matrix orthonormal during training: `spd_pair` has the transform and learns the matrix "
        "freely, so that the claim is not its own",
    ),
    "22": (
        "Input and output want vocabularies of different sizes (arXiv:2501.16975)",
        "a stream has one vocabulary, which is that of its inputs and of its targets",
    ),
}
