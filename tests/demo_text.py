"""A text for the demo model: prose, speech, numbers, code and formulas. No page, which changes."""

TEXT = """\
The harbour had been quiet since the storm. Two boats lay on the sand with their sides broken open, and a third, \
which belonged to the old pilot, was still tied to the pier by a single rope. "You can't repair that," said the \
boy. The pilot counted on his fingers: 3 planks at $14.50, a new mast, 200 nails, and paint. "By the 21st of \
June," he answered, "she'll be sailing to Vardø."

def fibonacci(n):
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a

Photosynthesis turns carbon dioxide and water into sugar and oxygen: 6 CO2 + 6 H2O -> C6H12O6 + 6 O2. It takes \
place in the chloroplasts, whose green pigment absorbs red and blue light.
"""
