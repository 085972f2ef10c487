"""A page of text for a first try, written for this project, with questions about it."""

#: 330 tokens in a prompt of SmolLM2.
HARBOUR = """\
The harbour of Velmora lies at the mouth of the river Tarn. In spring the fishermen repaint their boats, most of \
them blue, and the market opens before sunrise. The lighthouse keeper, Ines Caldera, has counted ships since 1987; \
she writes each name into a green book. Last year she counted 4,318 ships, more than ever before. The bakery on the \
square is known for its bread with fennel, which the baker, Tomas Reiter, learnt to bake from his grandmother. On \
market days he sells 260 loaves before noon.

The road to the mountains was built by the monks of Saint Aldric. It has 41 bridges, and the oldest of them is made \
of red stone. Travellers stop at the inn of the Three Herons, where a room costs 18 crowns and the soup is free. In \
winter the road is closed by snow, and letters come by sledge. The postman's dog is called Biscuit, and children \
wait for it at the gate.

Every autumn the town holds a feast of lanterns. The lanterns are made of paper and willow, and the largest one is \
carried by six men. Music is played until midnight, when the ferry to the island of Corrin leaves for the last time. \
The captain of the ferry, Johanna Brandt, has never missed a crossing. She drinks mint tea, tells stories about \
storms, and keeps the spare key of the ferry under a flowerpot beside the blue door."""

#: Their answers stand in the first and the second part of the page, long before its end.
QUESTIONS = (
    "How many ships did the lighthouse keeper count last year?",
    "What is the name of the postman's dog?",
    "What is the name of the lighthouse keeper?",
)
