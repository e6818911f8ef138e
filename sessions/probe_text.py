"""The text over which quants of a model are compared: prose, dialogue, numbers, a list and code, so that no one kind decides."""

PROBE_TEXT = """\
The lighthouse keeper wrote down the weather three times a day, in ink, whether or not anything had changed. On the fourth of
March the wind turned north-west at noon and the glass fell by eleven millibars in six hours. Two fishing boats came in early.
A third, the Marta, was seen from the tower at half past four, low in the water and without lights, and then was not seen again
until the morning, when she lay at her usual place as if nothing had been.

"You were out late," said the keeper.
"We were not out at all," said the skipper. "Ask my brother. We played cards until two."
"Then who brought her in?"
The skipper looked at the boat for a while before he answered. "Somebody who knows the harbour," he said.

Three explanations were offered in the village. First, that the keeper had mistaken one boat for another, which happens in
rain. Second, that the brothers had been paid to say nothing. Third, that the sea sometimes gives back what it has taken, but
asks for something else in return. Nobody could say what that would be. The schoolteacher, who liked figures, worked it out: of
1,284 entries in the keeper's books, 1,279 could be checked against the pilot station's, and of these 1,277 agreed. An error in
two of 1,279 is 0.16 percent. It was therefore far more likely that the keeper was right than that he was wrong.

To repair a net: 1. Cut out the torn meshes until only whole ones are left at the edge. 2. Fasten the twine to a corner mesh
with two half hitches. 3. Work along the edge, one knot for each mesh, and keep the gauge against the last row. 4. At the far
side turn the net over and come back. 5. Stretch the finished piece wet, and let it dry slowly.

def moving_average(values, width):
    if width < 1:
        raise ValueError("the width must be at least one")
    total = sum(values[:width])
    averages = [total / width]
    for index in range(width, len(values)):
        total += values[index] - values[index - width]
        averages.append(total / width)
    return averages

The function above keeps a running total instead of adding up each window anew, so that its time grows with the length of the
list and not with the width of the window. It has one weakness: with floating point numbers the total may drift by a little
with each step, and after a million steps the drift can be seen. Whoever needs exact results should add up each window, or use
whole numbers. In the keeper's case the numbers were whole, and there were never more than three of them a day.

Le bateau rentra au port avant l'aube. Das Boot lag am Morgen an seinem Platz. La barca era al suo posto, come sempre. In every
language of that coast there is a word for a thing that returns without having left, and in none of them is it a good word.
When the keeper retired he took the books with him, forty-one volumes, and on the last page of the last one he had written the
weather for the day after.
"""
