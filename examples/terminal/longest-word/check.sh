# Runs in the workspace after the attempt. Status 0 means solved; a last line such as "reward: 0.3" gives partial credit.
cmp -s words.txt "$(dirname "$0")/words.txt" || { echo "words.txt was changed"; exit 1; }
test -f longest.txt || { echo "longest.txt is missing"; exit 1; }
test "$(cat longest.txt)" = pomegranate || { echo "longest.txt has another word"; echo "reward: 0.3"; exit 1; }
