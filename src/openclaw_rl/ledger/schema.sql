CREATE TABLE sessions (
    number INTEGER PRIMARY KEY,
    owner TEXT NOT NULL,
    id TEXT NOT NULL,
    source TEXT NOT NULL,              -- how it was recognised: a header, a client's habit, history, import
    created REAL NOT NULL,
    last REAL NOT NULL,                -- when it was last heard of
    closed REAL,
    settled INTEGER NOT NULL DEFAULT 0,  -- whether, once ended and judged, it was looked at as a whole
    UNIQUE (owner, id)
);
CREATE INDEX open_sessions ON sessions (last) WHERE closed IS NULL;
CREATE INDEX unsettled_sessions ON sessions (number) WHERE closed IS NOT NULL AND NOT settled;
CREATE INDEX sessions_by_owner ON sessions (owner, last, number);

-- Requests as paths through a tree of messages: what requests have in common is stored once.
CREATE TABLE messages (
    number INTEGER PRIMARY KEY,
    session INTEGER NOT NULL REFERENCES sessions ON DELETE CASCADE,
    parent INTEGER REFERENCES messages,
    digest BLOB NOT NULL,              -- of the path: of this message and all before it
    body TEXT NOT NULL
);
CREATE UNIQUE INDEX message_paths ON messages (session, digest);
CREATE INDEX messages_by_parent ON messages (parent);

CREATE TABLE turns (
    number INTEGER PRIMARY KEY AUTOINCREMENT,  -- never that of a turn that was forgotten
    session INTEGER NOT NULL REFERENCES sessions ON DELETE CASCADE,
    completion TEXT NOT NULL,
    choice INTEGER NOT NULL,
    kind TEXT NOT NULL,
    kind_reason TEXT NOT NULL,
    state TEXT NOT NULL,
    reason TEXT NOT NULL DEFAULT '',   -- why it was dropped
    created REAL NOT NULL,
    version INTEGER NOT NULL,          -- the policy that answered
    continuation TEXT NOT NULL,
    parent INTEGER REFERENCES turns ON DELETE SET NULL,
    request INTEGER NOT NULL REFERENCES messages,  -- the last message of the request
    answer TEXT NOT NULL,              -- the assistant message
    base INTEGER REFERENCES turns,     -- the prompt: the first `keep` tokens of another turn's
    keep INTEGER NOT NULL,             -- prompt and response, then `added`
    added BLOB NOT NULL,
    prompt_length INTEGER NOT NULL,
    response BLOB NOT NULL,
    logprobs BLOB NOT NULL,
    top BLOB,
    sampling TEXT NOT NULL,
    finish_reason TEXT NOT NULL,
    request_key BLOB NOT NULL,
    end_key BLOB NOT NULL,
    next_state TEXT,                   -- the messages that came next
    next_at REAL,                      -- when they came
    ready_at REAL,
    forced BLOB,                       -- one bit for each response token that a constraint forced; NULL: none
    notes_from INTEGER,                -- the turn whose turn_notes its conversation has; NULL: none
    details TEXT                       -- what the API said with the answer, beyond the message; NULL: nothing
);
CREATE UNIQUE INDEX completions ON turns (completion, choice);
CREATE INDEX turns_by_end ON turns (end_key);
CREATE INDEX turns_by_request ON turns (request_key);
CREATE INDEX turns_by_state ON turns (state, reason);  -- they are counted so whenever somebody looks
CREATE INDEX turns_by_session ON turns (session);
CREATE INDEX turns_by_session_state ON turns (session, state);
-- What refers to a row is looked for when the row is deleted: forgetting must not read the whole ledger.
CREATE INDEX turns_by_base ON turns (base);
CREATE INDEX turns_by_parent ON turns (parent);
CREATE INDEX turns_by_message ON turns (request);

CREATE TABLE feedback (
    turn INTEGER NOT NULL REFERENCES turns ON DELETE CASCADE,
    score REAL NOT NULL,
    text TEXT NOT NULL,
    created REAL NOT NULL,
    source TEXT NOT NULL,
    correction TEXT NOT NULL DEFAULT ''  -- the answer that was wanted instead
);
CREATE INDEX feedback_by_turn ON feedback (turn);

CREATE TABLE verdicts (
    number INTEGER PRIMARY KEY,        -- in the order they were given
    turn INTEGER NOT NULL UNIQUE REFERENCES turns ON DELETE CASCADE,
    score REAL,                        -- NULL: nobody could say
    source TEXT,
    reason TEXT NOT NULL,
    votes TEXT NOT NULL,
    seconds REAL NOT NULL,
    sample TEXT,                       -- what it is trained on; NULL: nothing
    created REAL NOT NULL,
    plain_problem TEXT NOT NULL DEFAULT ''  -- why nothing is distilled
);
CREATE TABLE hints (
    turn INTEGER NOT NULL REFERENCES turns ON DELETE CASCADE,
    place INTEGER NOT NULL,            -- 0 is the most informative
    text TEXT NOT NULL,
    logprobs BLOB NOT NULL,            -- of the response under the hinted prompt; empty if not scored
    problem TEXT NOT NULL,             -- why not, if it was to be
    -- What top-k distillation needs of a teacher; each NULL where it was not asked for.
    top BLOB,                          -- its likeliest tokens at each position
    of_policy_top BLOB,                -- its log-probs of the policy's likeliest tokens
    policy_scores BLOB,                -- the policy's log-probs of the tokens in `top`
    PRIMARY KEY (turn, place)
);

CREATE TABLE updates (
    number INTEGER PRIMARY KEY,
    step INTEGER NOT NULL,
    version INTEGER,                   -- the policy it made, if it made one
    line TEXT NOT NULL DEFAULT 'shared',  -- the line of policies that it belongs to
    outcome TEXT NOT NULL,
    reason TEXT NOT NULL,
    metrics TEXT NOT NULL,
    created REAL NOT NULL
);
CREATE UNIQUE INDEX applied_steps ON updates (line, step) WHERE outcome = 'applied';
CREATE INDEX updates_by_version ON updates (version);
CREATE TABLE update_turns (
    number INTEGER NOT NULL REFERENCES updates,
    turn INTEGER NOT NULL,             -- stays when the turn itself is forgotten
    PRIMARY KEY (number, turn)
);
CREATE INDEX updates_by_turn ON update_turns (turn);
CREATE TABLE policies (
    version INTEGER PRIMARY KEY,
    parent INTEGER NOT NULL,           -- the version that it was made from; 0 is the base model
    label TEXT NOT NULL DEFAULT '',    -- what the servers of an outside trainer call its weights
    line TEXT NOT NULL DEFAULT 'shared'
);
CREATE INDEX policies_by_parent ON policies (parent);

-- Further policies that a policy was made from: those of the lines that were merged into it.
CREATE TABLE merged_policies (
    version INTEGER NOT NULL,
    parent INTEGER NOT NULL,
    PRIMARY KEY (version, parent)
);

-- Turns that an outside trainer has claimed (see `leases`).
CREATE TABLE leases (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    created REAL NOT NULL,
    expires REAL NOT NULL,
    ended TEXT NOT NULL DEFAULT '',    -- how it ended; empty while it is open
    step INTEGER                       -- the step that it was confirmed as
);
CREATE INDEX open_leases ON leases (expires) WHERE ended = '';
CREATE TABLE lease_turns (             -- only of leases that are open
    lease INTEGER NOT NULL REFERENCES leases,
    turn INTEGER NOT NULL PRIMARY KEY
);
CREATE INDEX turns_of_lease ON lease_turns (lease);

CREATE TABLE groups (
    number INTEGER PRIMARY KEY,
    owner TEXT NOT NULL,
    name TEXT NOT NULL,
    size INTEGER NOT NULL,             -- how many attempts it is complete with
    first_reward REAL,                 -- when its first attempt was rewarded
    closed REAL,                       -- since when no attempt can join it
    settled REAL,                      -- since when the columns below hold
    mean REAL,                         -- of the rewards of its attempts
    rewarded INTEGER NOT NULL DEFAULT 0,
    constant INTEGER NOT NULL DEFAULT 0,  -- whether all of them are equal
    UNIQUE (owner, name)
);
CREATE INDEX unsettled_groups ON groups (closed) WHERE settled IS NULL;
CREATE INDEX groups_by_owner ON groups (owner, number);
CREATE TABLE group_steps (
    group_number INTEGER NOT NULL REFERENCES groups ON DELETE CASCADE,
    step INTEGER NOT NULL,
    mean REAL NOT NULL,                -- of the rewards of this step in two or more attempts
    PRIMARY KEY (group_number, step)
);
CREATE TABLE episodes (
    session INTEGER PRIMARY KEY REFERENCES sessions ON DELETE CASCADE,
    mode TEXT NOT NULL,
    state TEXT NOT NULL,
    task TEXT NOT NULL DEFAULT '',
    group_number INTEGER REFERENCES groups,
    reward REAL,
    solved INTEGER,
    error TEXT NOT NULL DEFAULT '',    -- why it failed
    result BLOB,                       -- a digest of what the environment said at its end
    ended REAL
);
CREATE INDEX held_episodes ON episodes (session) WHERE state = 'held';
CREATE INDEX episodes_by_group ON episodes (group_number);
CREATE TABLE episode_steps (
    turn INTEGER PRIMARY KEY REFERENCES turns ON DELETE CASCADE,
    step INTEGER NOT NULL,             -- the turn's index in its episode
    reward REAL
);

CREATE TABLE notes (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    owner TEXT NOT NULL,
    text TEXT NOT NULL,
    topic TEXT NOT NULL,
    turn INTEGER REFERENCES turns ON DELETE CASCADE,  -- after which the user said it; NULL: the owner wrote it
    created REAL NOT NULL,
    said REAL NOT NULL,                -- when the owner said or wrote it last
    state TEXT NOT NULL,
    reason TEXT NOT NULL DEFAULT '',   -- why it is retired or removed
    changed REAL NOT NULL,             -- when it got its state or its text: earlier outcomes no longer count
    pinned INTEGER NOT NULL DEFAULT 0,
    origin TEXT NOT NULL,
    conversations INTEGER NOT NULL DEFAULT 0,  -- how many began with it, or with it withheld
    scope TEXT NOT NULL DEFAULT '',    -- words of the requests that it is for; empty: all
    question TEXT NOT NULL DEFAULT ''  -- of an example; `text` is then the answer as wanted
);
CREATE INDEX notes_by_owner ON notes (owner, state);
CREATE INDEX notes_by_topic ON notes (topic);
CREATE INDEX notes_by_turn ON notes (turn);
-- The notes that an example shows.
CREATE TABLE example_notes (
    example INTEGER NOT NULL REFERENCES notes ON DELETE CASCADE,
    note INTEGER NOT NULL REFERENCES notes ON DELETE CASCADE,
    PRIMARY KEY (example, note)
);
CREATE INDEX examples_by_note ON example_notes (note);
-- The notes of the conversations that begin with a turn, as they stood then.
CREATE TABLE turn_notes (
    turn INTEGER NOT NULL REFERENCES turns ON DELETE CASCADE,
    place INTEGER NOT NULL,
    note INTEGER NOT NULL,             -- stays when the note is forgotten
    text TEXT NOT NULL,
    given INTEGER NOT NULL,            -- 0: withheld
    question TEXT NOT NULL DEFAULT '', -- of an example
    PRIMARY KEY (turn, place)
);
CREATE INDEX turn_notes_by_note ON turn_notes (note);
-- The prompt of a turn with notes as it is without them: the tokens [start, stop) are replaced by `added`.
CREATE TABLE prompts_without_notes (
    turn INTEGER PRIMARY KEY REFERENCES turns ON DELETE CASCADE,
    start INTEGER NOT NULL,
    stop INTEGER NOT NULL,
    added BLOB NOT NULL,
    logprobs BLOB NOT NULL DEFAULT x'' -- of the response after it, under the policy that answered
);
-- How the first answers of conversations were received.
CREATE TABLE note_outcomes (
    turn INTEGER NOT NULL REFERENCES turns ON DELETE CASCADE,
    note INTEGER NOT NULL REFERENCES notes ON DELETE CASCADE,
    given INTEGER NOT NULL,
    held INTEGER NOT NULL,
    created REAL NOT NULL,
    PRIMARY KEY (turn, note)
);
CREATE INDEX outcomes_by_note ON note_outcomes (note, given, created);

-- The practice of notes. A practised answer is a side turn in a session of its own.
CREATE TABLE practices (
    number INTEGER PRIMARY KEY AUTOINCREMENT, -- never used again: the server may still work on one that was deleted
    owner TEXT NOT NULL,
    note INTEGER NOT NULL REFERENCES notes ON DELETE CASCADE,
    state TEXT NOT NULL,
    reason TEXT NOT NULL DEFAULT '',
    by_hand INTEGER NOT NULL,
    steps INTEGER NOT NULL DEFAULT 0,  -- 0 before it begins
    created REAL NOT NULL,
    ended REAL
);
CREATE INDEX practices_by_note ON practices (note);
CREATE TABLE practised (
    turn INTEGER PRIMARY KEY REFERENCES turns ON DELETE CASCADE,
    practice INTEGER NOT NULL REFERENCES practices ON DELETE CASCADE,
    asked INTEGER,                     -- the turn whose first message it answers; NULL: it came with the program
    anchor INTEGER NOT NULL            -- whether the note is not for its prompt
);
CREATE INDEX practised_by_practice ON practised (practice);
CREATE INDEX practised_by_question ON practised (asked);

-- Deleted sessions that may still be in files.
CREATE TABLE unfinished_deletions (number INTEGER PRIMARY KEY, session TEXT NOT NULL UNIQUE);

-- The log of changes (see `pages`). Its first row makes its numbers begin after cursor 0, which means "read all".
CREATE TABLE changes (
    number INTEGER PRIMARY KEY,        -- in the order of commits; it only grows, because the newest row stays
    kind TEXT NOT NULL,
    item INTEGER NOT NULL              -- the number of a session, turn (also for a verdict), update or practice
);
INSERT INTO changes (kind, item) VALUES ('start', 0);
CREATE TRIGGER changes_bounded AFTER INSERT ON changes WHEN NEW.number % 1000 = 0 BEGIN
    DELETE FROM changes WHERE number <= NEW.number - 50000; END;
CREATE TRIGGER session_added AFTER INSERT ON sessions BEGIN
    INSERT INTO changes (kind, item) VALUES ('session', NEW.number); END;
CREATE TRIGGER session_changed AFTER UPDATE OF last, closed ON sessions BEGIN
    INSERT INTO changes (kind, item) VALUES ('session', NEW.number); END;
CREATE TRIGGER session_removed AFTER DELETE ON sessions BEGIN
    INSERT INTO changes (kind, item) VALUES ('session', OLD.number); END;
CREATE TRIGGER turn_added AFTER INSERT ON turns BEGIN
    INSERT INTO changes (kind, item) VALUES ('turn', NEW.number); END;
CREATE TRIGGER turn_changed AFTER UPDATE OF state, next_state ON turns BEGIN
    INSERT INTO changes (kind, item) VALUES ('turn', NEW.number); END;
CREATE TRIGGER turn_removed AFTER DELETE ON turns BEGIN
    INSERT INTO changes (kind, item) VALUES ('turn', OLD.number); END;
CREATE TRIGGER feedback_added AFTER INSERT ON feedback BEGIN
    INSERT INTO changes (kind, item) VALUES ('turn', NEW.turn); END;
CREATE TRIGGER verdict_added AFTER INSERT ON verdicts BEGIN
    INSERT INTO changes (kind, item) VALUES ('verdict', NEW.turn); END;
CREATE TRIGGER update_added AFTER INSERT ON updates BEGIN
    INSERT INTO changes (kind, item) VALUES ('update', NEW.number); END;
CREATE TRIGGER update_changed AFTER UPDATE OF outcome ON updates BEGIN
    INSERT INTO changes (kind, item) VALUES ('update', NEW.number); END;
CREATE TRIGGER practice_added AFTER INSERT ON practices BEGIN
    INSERT INTO changes (kind, item) VALUES ('practice', NEW.number); END;
CREATE TRIGGER practice_changed AFTER UPDATE OF state ON practices BEGIN
    INSERT INTO changes (kind, item) VALUES ('practice', NEW.number); END;
CREATE TRIGGER episode_added AFTER INSERT ON episodes BEGIN
    INSERT INTO changes (kind, item) VALUES ('session', NEW.session); END;
CREATE TRIGGER episode_changed AFTER UPDATE OF state ON episodes BEGIN
    INSERT INTO changes (kind, item) VALUES ('session', NEW.session); END;
