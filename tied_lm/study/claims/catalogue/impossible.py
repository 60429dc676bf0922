"""Claims that cannot be put to the test with what there is, and why."""

NOT_DONE = {
    "19": (
        "An orthonormal shared memory with a learned transform keeps output = pseudo-inverse of input "
        "(arXiv:2602.04556)",
        "no scheme keeps the matrix orthonormal during training: `spd_pair` has the transform and learns the matrix "
        "freely, so that the claim is not its own",
    ),
    "20": (
        "Centring the output embeddings stops logit drift, tied or not (arXiv:2601.02031)",
        "no scheme subtracts the mean row after an update; in the loss itself it changes nothing, since a softmax does "
        "not see what all logits share",
    ),
    "22": (
        "Input and output want vocabularies of different sizes (arXiv:2501.16975)",
        "a stream has one vocabulary, which is that of its inputs and of its targets",
    ),
}
