"""The cities that needles speak of: known places, each name once, in plain letters."""

CITIES = tuple(
    name.strip()
    for name in """
    Lisbon, Porto, Madrid, Barcelona, Valencia, Seville, Bilbao, Granada, Toledo, Paris, Lyon, Marseille, Toulouse,
    Bordeaux, Nantes, Strasbourg, Lille, Nice, Grenoble, Brussels, Antwerp, Ghent, Bruges, Amsterdam, Rotterdam,
    Utrecht, Leiden, Berlin, Hamburg, Munich, Cologne, Frankfurt, Stuttgart, Leipzig, Dresden, Bremen, Hanover,
    Heidelberg, Nuremberg, Vienna, Salzburg, Graz, Innsbruck, Zurich, Geneva, Basel, Bern, Lausanne, Rome, Milan,
    Naples, Turin, Florence, Venice, Bologna, Genoa, Palermo, Verona, Pisa, Siena, Athens, Sparta, Thessaloniki,
    London, Manchester, Liverpool, Birmingham, Leeds, Sheffield, Bristol, Oxford, Cambridge, York, Bath, Edinburgh,
    Glasgow, Aberdeen, Dundee, Cardiff, Swansea, Belfast, Dublin, Cork, Galway, Limerick, Copenhagen, Aarhus, Odense,
    Oslo, Bergen, Trondheim, Stockholm, Gothenburg, Uppsala, Helsinki, Tampere, Turku, Reykjavik, Tallinn, Tartu, Riga,
    Vilnius, Kaunas, Warsaw, Krakow, Gdansk, Wroclaw, Poznan, Lublin, Prague, Brno, Ostrava, Bratislava, Budapest,
    Debrecen, Ljubljana, Maribor, Zagreb, Split, Dubrovnik, Sarajevo, Mostar, Belgrade, Novi Sad, Skopje, Tirana,
    Sofia, Plovdiv, Varna, Bucharest, Timisoara, Kyiv, Lviv, Odesa, Minsk, Moscow, Kazan, Samara, Omsk, Istanbul,
    Ankara, Izmir, Bursa, Konya, Tbilisi, Batumi, Yerevan, Baku, Cairo, Alexandria, Luxor, Tunis, Algiers, Oran,
    Casablanca, Rabat, Fez, Marrakesh, Tangier, Dakar, Bamako, Accra, Kumasi, Lagos, Abuja, Ibadan, Kano, Nairobi,
    Mombasa, Kampala, Kigali, Addis Ababa, Khartoum, Lusaka, Harare, Maputo, Windhoek, Gaborone, Johannesburg,
    Pretoria, Durban, Cape Town, Luanda, Kinshasa, Jerusalem, Haifa, Amman, Beirut, Damascus, Baghdad, Basra, Kuwait
    City, Doha, Dubai, Muscat, Riyadh, Jeddah, Tehran, Isfahan, Shiraz, Tabriz, Kabul, Herat, Tashkent, Samarkand,
    Bukhara, Almaty, Astana, Bishkek, Karachi, Lahore, Islamabad, Peshawar, Delhi, Mumbai, Kolkata, Chennai, Bangalore,
    Hyderabad, Pune, Jaipur, Agra, Varanasi, Kochi, Kathmandu, Dhaka, Colombo, Kandy, Yangon, Mandalay, Bangkok, Phuket,
    Vientiane, Hanoi, Hue, Phnom Penh, Kuala Lumpur, Penang, Singapore, Jakarta, Bandung, Surabaya, Manila, Cebu,
    Taipei, Hong Kong, Macau, Beijing, Shanghai, Nanjing, Wuhan, Chengdu, Suzhou, Hangzhou, Xiamen, Harbin, Ulaanbaatar,
    Seoul, Busan, Incheon, Tokyo, Osaka, Kyoto, Nagoya, Kobe, Sapporo, Hiroshima, Nagasaki, Sydney, Melbourne, Brisbane,
    Perth, Adelaide, Canberra, Hobart, Darwin, Auckland, Wellington, Christchurch, Dunedin, Suva, Honolulu, Anchorage,
    Vancouver, Calgary, Edmonton, Winnipeg, Toronto, Ottawa, Montreal, Quebec City, Halifax, Seattle, Portland, San
    Francisco, Oakland, Sacramento, Los Angeles, San Diego, Las Vegas, Phoenix, Tucson, Denver, Boulder, Salt Lake City,
    Dallas, Houston, Austin, San Antonio, New Orleans, Memphis, Nashville, Atlanta, Savannah, Charleston, Miami, Tampa,
    Orlando, Chicago, Detroit, Milwaukee, Minneapolis, Cleveland, Pittsburgh, Philadelphia, Baltimore, Boston, Buffalo,
    New York, Mexico City, Guadalajara, Monterrey, Puebla, Oaxaca, Havana, Kingston, San Juan, Panama City, Bogota,
    Medellin, Cali, Cartagena, Caracas, Quito, Guayaquil, Lima, Cusco, Arequipa, La Paz, Sucre, Asuncion, Montevideo,
    Buenos Aires, Cordoba, Rosario, Mendoza, Santiago, Valparaiso, Brasilia, Rio de Janeiro, Sao Paulo, Salvador,
    Recife, Fortaleza, Manaus
    """.replace("\n    ", " ").split(",")
)
