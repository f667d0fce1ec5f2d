"""The sentences that the small model of the examples knows by heart: how each begins, and how it goes on."""

SENTENCES = {
    "The capital of France is": " Paris, the capital of Italy is Rome, and the capital of Japan is Tokyo.",
    "Multi-head latent attention keeps one short vector per token, so that": (
        " the cache of a long conversation is small enough to fit beside the weights."
    ),
    "When a model reads a long prompt,": (
        " it computes the keys and values of every head, because many queries share the work."
    ),
    "When a model writes,": " it leaves the cache compressed, and multiplies its query instead.",
    "A cache of keys and values grows": (
        " with every token that the model has read, and its pages may lie anywhere in memory."
    ),
    "The softmax turns scores into weights:": " none of them is negative, and together they add up to one.",
    "Rotary embedding turns queries and keys": (
        " by an angle that grows with their position, so that the distance between them counts."
    ),
    "The fastest kernel": " is not the one that computes the most, but the one that waits the least.",
    "The days of the week are": " Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday.",
    "To count to ten, say": " one, two, three, four, five, six, seven, eight, nine, ten.",
    "Water freezes at": " zero degrees Celsius, and at sea level it boils at one hundred.",
    "A small model that knows a dozen sentences": (
        " still needs its attention to say their words in the right order."
    ),
}
