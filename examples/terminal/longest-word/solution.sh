awk 'length > most { most = length; word = $0 } END { print word }' words.txt > longest.txt
