"""The words that tasks are drawn from."""


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


PEOPLE = words("Ada Ben Cleo Dina Egon Fay Gus Hana Ivo Jana Kai Lena Mara Nils Olga Paul Rosa Sven Tara Uwe Vera")
SURNAMES = words("Adler Brandt Cole Diaz Evans Frost Gray Holt Ito Jensen Klein Lund Moss Nagy Otto Park")
CITIES = words(
    "Accra Bergen Cairo Delhi Essen Faro Genoa Hanoi Ibiza Jaipur Kyoto Lima Lyon Malmo Nice Osaka Porto Quito Riga "
    "Sofia Turin Ulm Vienna Warsaw Xian York Zagreb Bonn Cork Dublin"
)
COMMANDS = words(
    "Save Open Close Print Copy Paste Share Delete Rename Move Send Archive Export Import Refresh Upload Download "
    "Undo Redo Search Help Settings Profile Login Logout Back Next Stop Start Pause Edit Add Remove Sort Filter "
    "Reply Forward Accept Decline Cancel Publish Preview Lock Unlock Mute Follow Pin Report"
)
TOPICS = words(
    "garden chess piano sailing bread pottery birds maps clocks bridges stars poems rivers trains coffee paper"
)
FORMS_OF_BOOKS = ("handbook", "history", "guide", "atlas", "stories", "lessons")
GOODS = words(
    "tea lamp chair soap rope bread candle basket kettle blanket mirror pencil shovel ladder bucket pillow broom "
    "jacket carpet hammer needle plate spoon towel vase wallet bottle brush comb drum flute glove"
)
